"""Checks and rehearsals: prove, without a model, that machines can train together."""

from shardtune.errors import require_packages

require_packages()  # every program of this folder begins here
