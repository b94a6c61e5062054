"""Chat messages of logs as the text that a model saw, by the template in its folder."""

from __future__ import annotations

from pathlib import Path

from drafter_service.client.chat_template import RefusedMessagesError, load_chat_template
from drafter_service.ingest.faults import RecordError
from drafter_service.ingest.messages import Chat, Message, plain_text
from ssd.errors import UserError

REFUSED = "messages that the model's chat template refuses"
WITHOUT = "the messages of a prompt are put one after the other"


class ChatTemplate:
    """The template of a model folder; without one, messages are put one after the other."""

    def __init__(self, folder: Path) -> None:
        self.note: str | None = None
        """Why there is no template, for the user."""
        self.was_missed = False
        """Whether there were messages to put through one."""
        try:
            self._template = load_chat_template(folder)
            if self._template is None:
                self.note = f"{folder} has no chat template; {WITHOUT}"
        except UserError as problem:
            self._template = None
            self.note = f"{problem}; {WITHOUT}"

    def prompt_text(self, chat: Chat) -> str:
        """What the model sees before it answers. Raises RecordError."""
        if self._template is None:
            self.was_missed = True
            return "".join(f"{plain_text(message)}\n" for message in chat.messages)
        return self._render(chat, True)

    def reply_text(self, chat: Chat | None, message: Message) -> str:
        """What the model wrote if it was read as `message` after `chat`. Raises RecordError."""
        if self._template is None or chat is None:
            return plain_text(message)
        prompt = self._render(chat, True)
        whole = self._render(chat._replace(messages=[*chat.messages, message]), False)
        return whole[len(prompt) :] if whole.startswith(prompt) else plain_text(message)

    def _render(self, chat: Chat, expects_answer: bool) -> str:
        assert self._template is not None
        try:
            return self._template.render(chat.messages, tools=chat.tools, add_generation_prompt=expects_answer)
        except RefusedMessagesError:  # It may say their content.
            raise RecordError(REFUSED) from None
