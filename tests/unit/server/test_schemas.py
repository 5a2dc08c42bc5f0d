"""Validation of JSON bodies."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from hashnet.server import schemas as s
from hashnet.server.schemas import ApiError


def test_validation_of_a_large_list_stops_at_the_first_mistake() -> None:
    """A body of 32 MB holds millions of them; each would be an object of its own."""
    wrong = ["?", -1, [None], {}] * 1000
    bodies = [
        (s.SearchBody, ("codes", "images", "features", "ids", "keys", "labels", "vectors")),
        (s.EncodeBody, ("images", "features")),
        (s.AddBody, ("item_ids", "codes", "images", "features", "labels", "keys", "vectors")),
        (s.RemoveBody, ("ids", "keys")),
    ]
    for model, names in bodies:
        lists = {name for name, field in model.model_fields.items() if "list" in str(field.annotation)}
        lists -= {"columns"}  # values of any type: pyarrow says what is wrong with them
        assert lists == set(names)
        for name in names:
            for entries in (
                wrong[1:],
                [wrong[1:]] if name in ("features", "labels", "vectors") else wrong[2:],
            ):
                with pytest.raises(ValidationError) as caught:
                    model.model_validate_json(json.dumps({name: entries}))
                mistakes = [one for one in caught.value.errors() if one["type"] != "missing"]
                assert len(mistakes) <= (2 if name == "labels" else 1)  # a label is a number or a name
    with pytest.raises(ValidationError) as caught:
        s.SearchBody.model_validate_json(json.dumps({"x" * 10_000 + str(i): 1 for i in range(100)}))
    assert caught.value.error_count() == 1
    assert len(str(s.explain(caught.value))) < 200


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"labels": [1.5]}, "labels.0: must be a valid integer or must be a valid string"),
        ({"label": [1]}, "body: there is no field 'label'"),
        ({"codes": ["zz"]}, "codes.0: must be hexadecimal, two digits per byte"),
        ({"k": "x", "ids": [-1]}, "ids.0: must be greater than or equal to 0; k: must be a valid integer"),
    ],
)
def test_messages_show_nothing_of_how_a_field_is_checked(body: dict, sentence: str) -> None:
    with pytest.raises(ApiError) as caught:
        s.parse(s.SearchBody, json.dumps({"codes": ["00"]} | body).encode())
    parts = str(caught.value).split("; ")
    assert sorted(parts) == sorted(sentence.split("; "))
