"""Every error a caller may see, as one tree.

MlxinferError
├── InvalidRequestError        a value the caller sent is wrong (HTTP 400, also a ValueError)
│   └── ContextLengthError     prompt + max_tokens do not fit the context
├── ModelNotFoundError         no such model, file or alias (HTTP 404)
├── OfflineError               it is known, not on this machine, and the hub cannot be reached
├── GatedModelError            the hub wants a licence accepted or a token first
├── ModelFileError             a file of the model is corrupt, truncated, hostile or missing
├── UnsupportedModelError      a sound file, an architecture or format that is not supported
├── DownloadError              a download broke off or failed its checksum; what arrived is kept
├── ConversionError            a model could not be converted: a full disk, a destination that exists, a changed source
├── WontFitError               the model does not fit this machine's memory
│   └── ModelsBusyError        it would, but models that are at work stand in the way (HTTP 503)
├── QueueFullError             too many requests are waiting (HTTP 429)
├── StoreError                 the conversations on disk cannot be opened, read or written
├── TrainingError              training cannot go on: a loss that is no number, ranks that differ
├── EngineError                a step failed inside the engine (HTTP 500)
└── EngineClosedError          the model was unloaded (HTTP 503)

Foreign exceptions are mapped onto this tree where they enter; `exit_code` is what the CLI ends with and
`status` what the server answers.
"""

from __future__ import annotations


class MlxinferError(Exception):
    """Base class; `str(error)` is one message that carries the value, the limit and what to do."""

    exit_code: int = 1
    status: int = 500
    code: str = "internal_error"


class InvalidRequestError(MlxinferError, ValueError):
    """A value from the caller is out of range or of the wrong kind. `param` names the field."""

    exit_code = 2
    status = 400
    code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt and the tokens asked for, exceed the model's context."""

    exit_code = 1
    code = "context_length_exceeded"


class ModelNotFoundError(MlxinferError):
    """No model, file or alias of that name."""

    exit_code = 3
    status = 404
    code = "model_not_found"


class OfflineError(MlxinferError):
    """The model is not on this machine and the hub cannot be reached (or HF_HUB_OFFLINE is set)."""

    exit_code = 3
    status = 503
    code = "offline"


class GatedModelError(MlxinferError):
    """The hub refuses the download until a licence is accepted or a token is given."""

    exit_code = 3
    status = 403
    code = "gated_model"


class ModelFileError(MlxinferError):
    """A model file is corrupt, truncated, hostile or missing. The message names file and field."""

    code = "model_file"


class UnsupportedModelError(MlxinferError):
    """The files are sound, but nothing here can run this architecture or format."""

    code = "unsupported_model"


class DownloadError(MlxinferError):
    """A download broke off, the disk is full or a checksum differs; partial files are kept for a resume."""

    code = "download_failed"


class ConversionError(MlxinferError):
    """A model could not be converted or written. The destination is untouched; the message says what was kept."""

    code = "conversion_failed"


class WontFitError(MlxinferError):
    """The model needs more memory than this machine gives."""

    exit_code = 4
    status = 503
    code = "wont_fit"


class ModelsBusyError(WontFitError):
    """The model would fit in place of others, which are at work. `retry_after` is a hint in seconds."""

    code = "models_busy"

    def __init__(self, message: str, *, retry_after: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFullError(MlxinferError):
    """Too many requests are waiting. `retry_after` is a hint in seconds."""

    status = 429
    code = "queue_full"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TrainingError(MlxinferError):
    """Training cannot go on; the message names the update and the rows. The last good state was kept."""

    code = "training_failed"


class StoreError(MlxinferError):
    """The conversations on disk cannot be opened, read or written; the message names the file."""

    code = "store_failed"


class EngineError(MlxinferError):
    """A step failed inside the engine; the request it belongs to ends with this error."""

    code = "engine_error"


class EngineClosedError(MlxinferError):
    """The model was unloaded, or the engine is shutting down."""

    status = 503
    code = "engine_closed"
