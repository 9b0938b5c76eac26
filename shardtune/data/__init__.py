"""Records become rows of tokens: reading, chat templates, tokens, packing, the schedule of steps."""
