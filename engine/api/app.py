"""HTTP routes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from drafter_service.observability.pages.page import style_sheet
from engine.api.endpoints import ClientGoneError, answer
from engine.api.errors import ApiError, engine_errors, error_response, from_http, from_validation
from engine.api.middleware import RequestChecks
from engine.api.schemas import ChatRequest, CompletionRequest, WeightsRequest
from engine.api.service import Service

PAGE = Path(__file__).with_name("page.html")
STYLE_SHEET = "/* shared style sheet */"
"""Placeholder in the page for the style sheet that all pages share."""
CLIENT_CLOSED_REQUEST = 499
"""Non-standard status that nginx logs when the client has closed the connection; it is never received."""


def create_app(
    service: Service, *, keys: Collection[str], max_body_bytes: int, version: str, allow_weight_updates: bool = False
) -> FastAPI:
    """Return an application that serves one model. allow_weight_updates: whether requests may replace its weights."""
    app = FastAPI(title="SSD engine", version=version, docs_url=None, redoc_url=None)
    app.add_middleware(RequestChecks, keys=keys, max_body_bytes=max_body_bytes)
    add_error_handlers(app)
    _add_model_routes(app, service)
    _add_weights_route(app, service, is_allowed=allow_weight_updates)
    _add_status_routes(app, service)
    return app


def _add_model_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, http: Request) -> dict[str, Any] | Response:
        """Complete prompts."""
        return await answer(service, body, http)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, http: Request) -> dict[str, Any] | Response:
        """Answer a chat."""
        return await answer(service, body, http)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the served model and its adapters."""
        return {"object": "list", "data": [service.model_entry(name) for name in service.models]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Describe the served model or an adapter."""
        return service.model_entry(name)


def _add_weights_route(app: FastAPI, service: Service, *, is_allowed: bool) -> None:
    @app.post("/v1/weights")
    async def weights(body: WeightsRequest) -> dict[str, int]:
        """Replace the weights of the served model."""
        if not is_allowed:
            raise ApiError(403, "this server does not change its weights; start it with --allow-weight-updates")
        with engine_errors("path"):
            return {"version": await service.engine.update_weights(body.path, body.version)}


def _add_status_routes(app: FastAPI, service: Service) -> None:
    html = PAGE.read_text(encoding="utf-8").replace(STYLE_SHEET, style_sheet())

    @app.get("/health", response_model=None)
    async def health() -> Response:
        """Report whether the engine runs."""
        if service.engine.gone is not None:
            raise ApiError(503, f"the engine has stopped: {service.engine.gone}")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Return Prometheus metrics."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", response_model=None, include_in_schema=False)
    async def page() -> Response:
        """Show the status page."""
        return HTMLResponse(html)

    @app.get("/figures", include_in_schema=False)
    async def figures() -> dict[str, Any]:
        """Return the data of the status page."""
        return service.figures()


def add_error_handlers(app: FastAPI) -> None:
    """Answer exceptions with errors in the format of the API."""

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid_body(_: Request, problem: RequestValidationError) -> Response:
        return error_response(from_validation(problem))

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, problem: HTTPException) -> Response:
        return error_response(from_http(problem))

    @app.exception_handler(ClientGoneError)
    async def on_client_gone(_: Request, __: ClientGoneError) -> Response:
        return PlainTextResponse("", CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def on_defect(_: Request, __: Exception) -> Response:
        return error_response(ApiError(500, "internal server error; see the server's log"))
