"""Requests made from a server's own OpenAPI description, good and bad, and what must hold of responses."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance


def exercise(schema: Any, headers: dict[str, str], max_examples: int) -> Counter:
    """Calls every operation; responses must be as described, and 5xx only a 503 with Retry-After.

    Whether random text is a picture or a known id cannot be said in a schema: such requests may be
    refused. Returns how often each status came.
    """
    statuses: Counter = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()
        takes_input = operation.body or operation.query or operation.path_parameters
        modes = list(GenerationMode) if takes_input else [GenerationMode.POSITIVE]
        for mode in modes:

            @settings(
                max_examples=max_examples,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def call(case: Any) -> None:
                case.headers.update(headers)
                response = case.call()
                statuses[response.status_code] += 1
                beside = [positive_data_acceptance]
                if response.status_code == 503:
                    names = {name.lower() for name in response.headers}
                    assert "retry-after" in names
                    beside.append(not_a_server_error)
                if response.status_code == 413:  # too much is a refusal, too
                    beside.append(negative_data_rejection)
                case.validate_response(response, excluded_checks=beside)

            call()
    return statuses
