"""The engine's errors.

EngineError
├── ModelRefused        the model can't be run here, and the message says why and what to do (exit 2)
├── ChatTemplateError   the model's chat template refused one row's messages (an error row)
├── ProtocolError       the bytes between worker and engine process make no message (engine/process/protocol.py)
└── EngineDied          the engine process is gone; carries the ids that were in flight
"""

from __future__ import annotations


class EngineError(Exception):
    """Root of everything the engine raises on purpose."""


class ModelRefused(EngineError):
    """A model that can't be loaded: missing weights, an architecture or quantization that is not supported."""


class ChatTemplateError(EngineError):
    """The model's chat template refused these messages; the text is the template's own."""


class EngineDied(EngineError):
    """The engine process ended; `in_flight` are the request ids it had not answered."""

    def __init__(self, message: str, exit_code: int | None, in_flight: tuple[int, ...]) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.in_flight = in_flight
