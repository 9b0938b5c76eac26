"""The processes of one run: who they are, how they talk, how they end."""
