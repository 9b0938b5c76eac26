"""Tokenizers with stock chat templates, and what a run trains with them."""

from pathlib import Path
from typing import Any

from helpers.data_run import Run, save_model

TEMPLATES = Path(__file__).parents[2] / ".venv/trl_templates"
END = "<|im_end|>"
TOOL = {"name": "rain", "description": "Rain.", "parameters": {"type": "object"}}


def stock_models(folder: Path, *names: str) -> dict[str, Path]:
    """Model directories by the names of their templates, without weights."""
    return {
        name: save_model(folder / name, (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
        for name in names
    }


def chatml(turn: str, prompt: str = "") -> str:
    """Return a template that writes each turn so, and this behind the beginning of an answer."""
    return (
        f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{turn}<|im_end|>\n{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{prompt}{{% endif %}}"
    )


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def trained(run: Run) -> list[str]:
    """The trained text of each sequence."""
    return [text for _, text in run.texts()]
