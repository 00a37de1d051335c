"""What the HTTP server logs. Port scanners and gRPC clients at the wrong port are no errors of ours."""

import logging
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log, but who speaks no HTTP costs one line, with nothing of what was said."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("aiohttp.server"))

    def exception(self, msg: object, *args: Any, exc_info: Any = True, **kwargs: Any) -> None:
        if isinstance(exc_info, HttpProcessingError):
            self.info("%s does not speak HTTP: %s", args[0] if args else "a client", type(exc_info).__name__)
        else:
            super().exception(msg, *args, exc_info=exc_info, **kwargs)
