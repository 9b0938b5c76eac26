"""Checks and rehearsals: prove that machines can train, alone and together."""
