"""Print the greedy tokens that mlx-lm makes of a model, of which it reads every file itself.

Run by the Python of .venv/engine: greedy_mlx.py MODEL_DIR TOKENS NUMBER, the tokens as JSON.
"""

import json
import sys

import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache


def main() -> None:
    folder, tokens, number = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    model = load(folder)[0]
    model.set_dtype(mx.float32)
    cache, made, inputs = make_prompt_cache(model), list[int](), tokens
    for _ in range(number):
        logits = model(mx.array([inputs]), cache=cache)
        inputs = [int(mx.argmax(logits[0, -1]).item())]
        made += inputs
    print(json.dumps(made))


if __name__ == "__main__":
    main()
