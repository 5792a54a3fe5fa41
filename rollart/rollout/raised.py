"""Makes what a Dask task raises fit to travel: owns what of an error stays behind, raises nothing itself.

Dask packs an error with the errors that it came of, which may be of others' code: one of them that can't be packed leaves a mere text of the
whole, on the user's terminal too. Of an error whose text is long Dask makes another one, with other arguments than its class takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MOST = 4000
"""Characters of an error's text that travel, half of them its end: Dask lets 10,000 pass."""

log = logging.getLogger(__name__)


def fit_to_travel(task: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The task, whose errors come alone and no longer than `MOST`; what they came of is in this process's log, at level info."""

    @wraps(task)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await task(*args, **kwargs)
        except Exception as error:
            log.info("a task failed", exc_info=error)
            error.__cause__ = error.__context__ = None
            if error.args and isinstance(text := error.args[0], str) and len(text) > MOST:
                error.args = (f"{text[: MOST // 2]} ... {text[-MOST // 2 :]}", *error.args[1:])
            raise

    return wrapped
