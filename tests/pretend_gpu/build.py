"""Build the device once for each version of PyTorch and of its source."""

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

_SOURCES = Path(__file__).resolve().parent
_TORCH = Path(torch.__file__).parent


def lacks_compiler() -> bool:
    return shutil.which("g++") is None


def build() -> Path:
    """Return the library, built now unless it is in `pretend_gpu/` of this environment.

    Raises:
        RuntimeError: the C++ compiler is missing, or it fails.
    """
    sources = sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    library = Path(sys.prefix) / "pretend_gpu" / f"{torch.__version__}-{digest}" / "device.so"
    if library.is_file():
        return library
    if lacks_compiler():
        raise RuntimeError("no C++ compiler (g++) - install one to pretend GPUs")
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes begin at once
        if not library.is_file():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    include = [f"-I{_TORCH / 'include'}", f"-I{_TORCH / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        flags = ["-O1", "-std=c++20", "-shared", "-fPIC", "-w"]
        command = ["g++", *flags, *include, str(_SOURCES / "device.cpp"), "-o", str(made)]
        done = subprocess.run([*command, *libraries], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"g++ cannot build the pretended GPU:\n{done.stderr[-3000:]}")
        made.replace(library)
