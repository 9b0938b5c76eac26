"""Both launch scripts as several nodes of this one machine."""

from shardtune.errors import require_packages

require_packages()
