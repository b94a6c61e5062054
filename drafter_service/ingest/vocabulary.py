"""Convert text to token ids, with the tokenizer and the chat template of a model folder."""

from __future__ import annotations

from pathlib import Path

from drafter_service.client.chat_template import RefusedMessagesError, load_chat_template
from drafter_service.client.tokenizer import TextTokenizer
from drafter_service.ingest.chats import Chat, Message, plain_text
from drafter_service.ingest.documents import RecordError
from ssd.errors import UserError

REFUSED = "messages that the model's chat template refuses"


class Vocabulary(TextTokenizer):
    """Tokenizer and chat template of one model. Any thread may use it."""

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer and the template of a model folder; errors as in `load_tokenizer`."""
        super().__init__(folder)
        self.chat = ChatFormatter(folder)


class ChatFormatter:
    """The chat template of a model folder. Without one, messages are concatenated."""

    def __init__(self, folder: Path) -> None:
        self.note: str | None = None
        """Message to the user, once messages were concatenated because there is no template."""
        self._template, self._problem = None, f"{folder} has no chat template"
        try:
            self._template = load_chat_template(folder)
        except UserError as problem:
            self._problem = str(problem)

    def prompt_text(self, chat: Chat) -> str:
        """Return the text of the model's input before its answer. Raises RecordError."""
        if self._template is None:
            self.note = f"{self._problem}; the messages of a prompt are concatenated"
            return "".join(f"{plain_text(message)}\n" for message in chat.messages)
        return self._render(chat, True)

    def reply_text(self, chat: Chat | None, message: Message) -> str:
        """Return the text that the model wrote if it was parsed as `message` after `chat`. Raises RecordError."""
        if self._template is None or chat is None:
            return plain_text(message)
        prompt = self._render(chat, True)
        whole = self._render(chat._replace(messages=[*chat.messages, message]), False)
        text = whole[len(prompt) :] if whole.startswith(prompt) else ""
        # Some templates leave out the reasoning, which the model wrote nevertheless.
        return text if text and message.get("reasoning_content", "").strip() in text else plain_text(message)

    def _render(self, chat: Chat, for_answer: bool) -> str:
        assert self._template is not None
        try:
            return self._template.render(
                chat.messages,
                tools=chat.tools,
                add_generation_prompt=for_answer,
                arguments=chat.template_arguments,
            )
        except RefusedMessagesError:  # Its message may contain text of users.
            raise RecordError(REFUSED) from None
