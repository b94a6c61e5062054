"""The routes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from engine.api.chat import chat
from engine.api.completions import complete
from engine.api.errors import ApiError, from_validation, refused, response_of
from engine.api.gate import Gate
from engine.api.page import read_page
from engine.api.respond import ClientGoneError
from engine.api.schemas import ChatRequest, CompletionRequest
from engine.api.service import Service
from ssd.errors import UserError

CLIENT_GONE = 499
"""Nobody reads this; nginx writes it into its logs."""


def create_app(service: Service, *, keys: Collection[str], max_body_bytes: int, version: str) -> FastAPI:
    """An application that serves one model."""
    app = FastAPI(title="SSD engine", version=version, docs_url=None, redoc_url=None)
    app.add_middleware(Gate, keys=keys, max_body_bytes=max_body_bytes)
    _add_errors(app)
    _add_model(app, service)
    _add_operations(app, service)
    return app


def _add_model(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, http: Request) -> dict[str, Any] | Response:
        """Complete prompts."""
        return await complete(service, body, http)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, http: Request) -> dict[str, Any] | Response:
        """Answer a chat."""
        return await chat(service, body, http)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [service.described()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The same, by its name."""
        service.check_model(name)
        return service.described()


def _add_operations(app: FastAPI, service: Service) -> None:
    html = read_page()

    @app.get("/health", response_model=None)
    async def health() -> Response:
        """Whether the engine is there."""
        if service.engine.gone is not None:
            raise ApiError(503, f"the engine has stopped: {service.engine.gone}")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", response_model=None, include_in_schema=False)
    async def dashboard() -> Response:
        """What goes on, and a box to try it."""
        return HTMLResponse(html)

    @app.get("/figures", include_in_schema=False)
    async def figures() -> dict[str, Any]:
        """What the page shows."""
        return service.figures()


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return response_of(error)

    @app.exception_handler(UserError)
    async def on_user_error(_: Request, error: UserError) -> Response:
        return response_of(refused(str(error), "prompt"))

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, problem: RequestValidationError) -> Response:
        return response_of(from_validation(problem))

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, problem: HTTPException) -> Response:
        return response_of(ApiError(problem.status_code, str(problem.detail)))

    @app.exception_handler(ClientGoneError)
    async def on_client_gone(_: Request, __: ClientGoneError) -> Response:
        return PlainTextResponse("", CLIENT_GONE)

    @app.exception_handler(Exception)
    async def on_defect(_: Request, __: Exception) -> Response:
        return response_of(ApiError(500, "the server made a mistake; its log says more"))
