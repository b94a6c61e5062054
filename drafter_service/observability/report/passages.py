"""The text of passages, where a tokenizer is at hand."""

from __future__ import annotations

from pathlib import Path

from drafter_service.observability.report.schema import NamespaceReport, Report
from ssd.errors import UserError

TOKENIZER_FILE = "tokenizer.json"


def with_text(report: Report, folder: Path) -> Report:
    """The same report with the text of its passages, by the tokenizer.json of a folder.

    Raises UserError for a folder that has no usable one, or if the tokenizers library is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError("--tokenizer needs tokenizers; run: pip install 'ssd-drafter[text]'") from None

    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise UserError(f"{folder} has no {TOKENIZER_FILE}; give the folder of the model that is served")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as problem:  # The library raises bare exceptions.
        raise UserError(f"{path} cannot be read ({problem}); download or copy it again") from None
    namespaces = [_with_text(namespace, tokenizer) for namespace in report.namespaces]
    return report.model_copy(update={"namespaces": namespaces})


def _with_text(namespace: NamespaceReport, tokenizer: object) -> NamespaceReport:
    if namespace.passages is None:
        return namespace
    passages = [
        passage.model_copy(update={"text": tokenizer.decode(passage.tokens, skip_special_tokens=False)})  # type: ignore[attr-defined]
        for passage in namespace.passages
    ]
    return namespace.model_copy(update={"passages": passages})
