"""Chat families: templates, parsers, turn junctions and stop tokens of kinds of checkpoints."""
