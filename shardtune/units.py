"""Bytes and seconds as people read them."""


def gb(n_bytes: float, digits: int = 1) -> str:
    """Return the number of GB, of 1e9 bytes, without the unit."""
    return f"{n_bytes / 1e9:.{digits}f}"


def rounded_gb(n_bytes: float) -> str:
    """Return a size in GB of 1e9 bytes, with three digits or more and the unit."""
    return f"{n_bytes / 1e9:,.0f} GB" if n_bytes >= 1e11 else f"{n_bytes / 1e9:.3g} GB"


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
