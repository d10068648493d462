"""Body: what all objects in request bodies have in common. The dialects' `fields.py` say what each may hold."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Body(BaseModel):
    """A field that is null counts as not given. One that is not declared is refused by name."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict) and None in value.values():
            return {name: given for name, given in value.items() if given is not None}
        return value
