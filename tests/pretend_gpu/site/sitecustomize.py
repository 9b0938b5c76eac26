"""Give this process its pretended GPUs when it imports torch. Python runs this at its start, since
`python -m tests.pretend_gpu` has put the folder on PYTHONPATH."""

import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path
from types import ModuleType


class _AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        # The finders behind this one. Some only ask whether there is a torch, so it stays.
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec and spec.loader:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                sys.path.append(str(Path(__file__).resolve().parent.parent.parent))
                import pretend_gpu

                gb = float(os.environ.get("PRETEND_GB", pretend_gpu.DEFAULT_GB))
                visible = os.environ.get("CUDA_VISIBLE_DEVICES")
                gpus = visible.count(",") + 1 if visible else int(os.environ["PRETEND_GPUS"])
                pretend_gpu.install(gpus, gb)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "PRETEND_GPUS" in os.environ and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    sys.meta_path.insert(0, _AfterTorch())
