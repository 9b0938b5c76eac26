"""Records with `text`, all of which is trained."""

from __future__ import annotations

from typing import Any

from shardtune.data.conversation import Text
from shardtune.data.forms.turns import Roles
from shardtune.data.outcomes import Note, require

FIELDS = ("text",)


def read(fields: dict[str, Any], roles: Roles, notes: list[Note]) -> Text:
    require(isinstance(fields["text"], str), "text", fields["text"], "a string")
    return Text(fields["text"])
