"""`inspect-data --html`: the first records as a person reads them, with trained text in colour."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardtune.report.charts import histogram_svg
from shardtune.report.inspect_data import (
    ShownSequence,
    counts,
    lines,
    places_of,
    sequences,
    tokenized,
)
from shardtune.report.page import require_page, write_page

_RECORDS_ON_PAGE = 50


def write_data_page(
    config_path: Path, assignments: Sequence[str], n_records: int | None, out: Path
) -> list[str]:
    """Tokenize data.train as a run does, and write a page of its first records.

    Returns:
        A sentence for each thing that happened to the data, as a run logs them.

    Raises:
        UserError: the configuration or the data is wrong, the tokenizer is missing, or `out`
            cannot be written or is not a page.
    """
    require_page(out)
    config, encoder, prepared = tokenized(config_path, assignments)
    n_shown = _RECORDS_ON_PAGE if n_records is None else n_records
    examples = places_of(config.data, set(prepared.examples.values()))
    first = {line: examples[record] for line, record in prepared.examples.items()}
    write_page(
        out,
        "data_page.html.jinja",
        title=f"{config_path.name}: what is trained",
        lines=[(line, ": WARNING: " in line, first.get(line)) for line in lines(prepared)],
        lengths=histogram_svg(
            prepared.train.lengths, "Lengths", "tokens in a sequence", config.data.max_length
        ),
        sequences=[
            _shown(encoder.tokenizer, sequence)
            for sequence in sequences(config.data, prepared.train, n_shown)
        ],
    )
    return prepared.lines


def _shown(tokenizer: Any, sequence: ShownSequence) -> dict[str, Any]:
    """Return a sequence for the page: its runs of text, each with whether it is trained."""
    record, place, source, tokens, trained, weights = sequence
    of = f" ({source})" if source else ""
    title = f"Record {record}{of}: {counts(trained, weights)}"
    return {"title": title, "place": place, "runs": [*_runs(tokenizer, tokens, trained)]}


def _runs(
    tokenizer: Any, tokens: Sequence[int], trained: Sequence[bool]
) -> Iterator[tuple[str, bool]]:
    pairs = zip(tokens, trained, strict=True)
    for is_trained, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
        ids = [token for token, _ in run]
        yield tokenizer.decode(ids, clean_up_tokenization_spaces=False), is_trained
