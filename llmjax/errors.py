"""Every error a user of llmjax can meet, as one typed tree.

The server maps `InvalidRequestError` to HTTP 400, `QueueFullError` to 429, `QueueTimeoutError`,
`ShutdownError` and `EngineDeadError` to 503, `RequestTimeoutError` to 504, `RequestFailedError` to
500. Each message says what was wrong and what is allowed.
"""


class LlmjaxError(Exception):
    """Base of every error that llmjax raises on purpose."""


class ConfigError(LlmjaxError, ValueError):
    """A configuration value is out of range or two of them contradict each other."""


class InvalidRequestError(LlmjaxError, ValueError):
    """A request cannot be served as asked.

    Args:
        message: what was wrong and what is allowed.
        param: the request field at fault, in the spelling of the API, or None.
        code: a short machine-readable word, such as "context_length_exceeded", or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class StructuredOutputError(LlmjaxError):
    """An output under way cannot go on by its grammar, which has become too complex to follow."""


class ChatTemplateError(InvalidRequestError):
    """A chat template refused the messages; carries the template's own text."""


class QueueFullError(LlmjaxError):
    """The waiting queue is full. `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: int = 1):
        super().__init__(message)
        self.retry_after = retry_after


class QueueTimeoutError(LlmjaxError, TimeoutError):
    """A request waited too long for its turn. `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: int = 1):
        super().__init__(message)
        self.retry_after = retry_after


class RequestTimeoutError(LlmjaxError, TimeoutError):
    """A request had not ended within its own `timeout`."""


class RequestFailedError(LlmjaxError):
    """The engine has met an error of its own (the `__cause__`) as it computed a request, and goes
    on without it."""


class EngineDeadError(LlmjaxError):
    """The engine stopped on an error (the `__cause__`), or makes no progress."""


class ShutdownError(LlmjaxError):
    """The engine was shut down on purpose, or is about to be: nothing more is served."""


class GroupError(LlmjaxError):
    """One of the processes that serve together is lost, or computes something else."""


class TransferError(LlmjaxError):
    """What came over a connection to a prefill worker, or to one's engine, makes no sense."""


class PrefillMismatchError(TransferError):
    """A prefill worker and an engine run different models, or keep pages in different ways.

    Args:
        who: the other side.
        name: what differs; `ours` and `theirs` are its values.
    """

    def __init__(self, who: str, name: str, ours: object, theirs: object):
        self.name, self.ours, self.theirs = name, ours, theirs
        super().__init__(
            f"{name}: {who} has {theirs!r}, and this engine {ours!r}, allowed: the same, or pages "
            "of one are of no use to the other"
        )


class UnexpectedCompileError(LlmjaxError, RuntimeError):
    """The hot path compiled a program after warm-up (raised only under the compile guard)."""


class ModelLoadError(LlmjaxError):
    """Base of what can go wrong between a model's name and its weights in memory."""


class ModelNotFoundError(ModelLoadError, FileNotFoundError):
    """A model name, path or hub repository leads nowhere."""


class DownloadError(ModelLoadError):
    """A download failed, or what came does not have the expected checksum."""


class CheckpointFormatError(ModelLoadError, ValueError):
    """A file is not what it should be: truncated, an HTML page, a git-LFS pointer, ..."""


class UnsupportedModelError(ModelLoadError, ValueError):
    """The architecture, tensor type, rope scaling, ... is not one that llmjax implements."""


class WeightMismatchError(ModelLoadError, ValueError):
    """The checkpoint's tensors are not those the architecture needs.

    Lists every problem at once. Each of `missing`, `extra` and `misshapen` is a list of
    checkpoint tensor names; `misshapen` entries carry both shapes.
    """

    def __init__(self, missing: list[str], extra: list[str], misshapen: list[str]):
        self.missing, self.extra, self.misshapen = missing, extra, misshapen
        parts = []
        for title, names in (
            ("missing", missing),
            ("not expected", extra),
            ("of the wrong shape", misshapen),
        ):
            if names:
                shown = "\n  ".join(names[:40])
                more = f"\n  ... and {len(names) - 40} more" if len(names) > 40 else ""
                parts.append(f"{len(names)} tensor(s) {title}:\n  {shown}{more}")
        super().__init__("the checkpoint does not fit the architecture; " + "\n".join(parts))
