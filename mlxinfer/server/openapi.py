"""GET /openapi.json: what the server answers, from the models its routes read their bodies by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.requests import Request  # noqa: TC002 (FastAPI reads the annotations)
from starlette.responses import Response  # noqa: TC002

from mlxinfer.server.errors import json_response

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic import BaseModel

router = APIRouter()
BODY = "x-body"
_bodies: dict[str, type[BaseModel]] = {}
"""By the name that stands for the model until the document is made: FastAPI takes plain data only."""
ERROR = {
    "description": "What was wrong.",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "param", "code"],
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": ["string", "null"]},
                        },
                    }
                },
            }
        }
    },
}


def reads(model: type[BaseModel]) -> dict[str, Any]:
    """For a route's `openapi_extra`: its body is a `model`. Routes parse bodies themselves, within limits."""
    name = f"{model.__module__}.{model.__qualname__}"
    _bodies[name] = model
    return {BODY: name}


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """The document; the same until the server ends."""
    app: FastAPI = request.app
    if app.openapi_schema is None:
        app.openapi_schema = document(app)
    return json_response(app.openapi_schema)


def document(app: FastAPI) -> dict[str, Any]:
    """OpenAPI 3.1 of all the app's routes."""
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    operations = list(_operations(made))
    models = [_bodies[operation[BODY]] for operation in operations if BODY in operation]
    schemas, shared = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    definitions = shared.get("$defs", {})
    for model in models:
        _add_harmless(model, definitions[schemas[model, "validation"]["$ref"].rsplit("/", 1)[1]])
    for operation in operations:
        # FastAPI adds what its own parsing would answer.
        operation["responses"].pop("422", None)
        operation["responses"].setdefault("default", {"$ref": "#/components/responses/Error"})
        if (name := operation.pop(BODY, None)) is not None:
            schema = schemas[_bodies[name], "validation"]
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    made["components"] = {"schemas": definitions, "responses": {"Error": ERROR}}
    return made


def _operations(made: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for path in made["paths"].values():
        yield from path.values()


def _add_harmless(model: type[BaseModel], schema: dict[str, Any]) -> None:
    for name in sorted(getattr(model, "harmless", ())):
        schema["properties"].setdefault(name, {"description": "Ignored, and named in a header of the answer."})
