"""A small model of one's own: tokenizer, random weights, and a warm start on demonstrations."""
