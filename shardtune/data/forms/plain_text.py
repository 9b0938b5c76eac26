"""Records with `text`, all of which is trained."""

from shardtune.data.records import Fields, Text

FIELDS = ("text",)


def read(fields: Fields) -> Text:
    return Text(fields.text("text"))
