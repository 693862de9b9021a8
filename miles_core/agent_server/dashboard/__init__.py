"""The dashboard of the agent server: one page and its data, which change nothing."""
