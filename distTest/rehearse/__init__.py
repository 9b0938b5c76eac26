"""Both launch scripts as several nodes of this one machine."""
