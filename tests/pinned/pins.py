"""What tests find on any machine: the dtypes of its CPU, its cores and its memory.

And the names in all models of transformers, which one process of the tests reads for all others.
"""

import functools
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_CORES = 2
_MEMORY_BYTES = 8 << 30


def pin() -> None:
    """Pin what is imported already, and each other module as soon as it is imported."""
    allowed = os.sched_getaffinity
    os.cpu_count = lambda: _CORES
    os.sched_getaffinity = lambda pid, /: set(sorted(allowed(pid))[:_CORES])
    for name in sys.modules.keys() & _PINS.keys():
        _PINS[name](sys.modules[name])
    sys.meta_path.insert(0, _Finder())


def _bfloat16(cpu: Any) -> None:
    """No CPU multiplies it itself, or every one does with TESTS_HAVE_BFLOAT16=1.

    With ATEN_CPU_CAPABILITY=avx2, PyTorch's variable, it is emulated here, too.
    """
    flags = {"avx512_bf16": os.environ.get("TESTS_HAVE_BFLOAT16") == "1", "amx_bf16": False}
    read = cpu.get_capabilities
    cpu.get_capabilities = functools.cache(lambda: {**read(), **flags})
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
        cpu.torch._C._set_mkldnn_enabled(False)


def _memory(psutil: Any) -> None:
    read, pinned = psutil.virtual_memory, {"total": _MEMORY_BYTES, "available": _MEMORY_BYTES}
    psutil.virtual_memory = lambda: read()._replace(**pinned)


def _limits(host_memory: Any) -> None:
    nothing = host_memory.Path(os.devnull)
    host_memory.available_memory.__defaults__ = (nothing, nothing)


def _names_of_models(import_utils: Any) -> None:
    """Keep what transformers reads at its import, twice, in a thousand files: 0.8 s of a CPU."""
    # Not at the import of this file, which each process pays for.
    import json
    import zlib
    from pathlib import Path

    read = import_utils.define_import_structure

    @functools.cache
    def kept(path: Any, prefix: str | None = None) -> Any:
        if not str(path).endswith(("/models", "/models/__init__.py")):
            return read(path, prefix)
        key = zlib.crc32(f"{path} {prefix}".encode())
        file = Path(os.environ["TESTS_FOLDER"], f"names-{key}.json")
        if not file.exists():
            found = [
                ([*packages], {name: [*names] for name, names in modules.items()})
                for packages, modules in read(path, prefix).items()
            ]
            part = file.with_suffix(f".{os.getpid()}")  # others read a whole file
            part.write_text(json.dumps(found), encoding="utf-8")
            part.replace(file)
        return {
            frozenset(packages): {name: {*names} for name, names in modules.items()}
            for packages, modules in json.loads(file.read_text(encoding="utf-8"))
        }

    import_utils.define_import_structure = kept


_PINS: dict[str, Callable[[ModuleType], None]] = {
    "transformers.utils.import_utils": _names_of_models,
    "torch.cpu": _bfloat16,
    "psutil": _memory,
    "shardtune.distributed.host_memory": _limits,
}


class _Finder:
    def find_spec(self, name: str, *rest: Any) -> ModuleSpec | None:
        if name not in _PINS:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(name, *rest) for finder in behind)), None)
        if spec and spec.loader:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _PINS[name](module)

            spec.loader.exec_module = exec_module
        return spec
