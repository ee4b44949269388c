"""Starting an engine in a process of its own, from the process of its front end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenyard.engine.process import EngineProcess
from tokenyard.ipc.reports import report_from_message
from tokenyard.launch.assemble import EngineFacts, at_commit, check_before_fetching, metadata_type
from tokenyard.launch.cache_size import check_max_model_len
from tokenyard.launch.engine_process import MODULE, launch_message
from tokenyard.launch.tracing import with_absolute_trace
from tokenyard.model.files import resolve_model

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.model.hub import Token


class OwnProcessStart:
    """The process starts at once; while it imports and loads, the caller has `files` to load its own things from.

    The model is found, and fetched, here: the process gets the commit, no token, and asks no network. Nothing is left
    running when making one raises; after that, `stop` is the caller's.
    """

    def __init__(
        self,
        config: EngineConfig,
        catalogue: Catalogue,
        on_progress: Callable[[str], None] | None = None,
        hub_token: Token = None,
        process: EngineProcess | None = None,
    ) -> None:
        """`process`: one that was started with MODULE already, and belongs to this object from now on."""
        self._on_progress = on_progress
        self.process = process or EngineProcess(MODULE)
        try:
            self._metadata_type = metadata_type(config, catalogue)
            check_before_fetching(config, catalogue)
            model = config.model
            self.files = resolve_model(model.name, on_progress, revision=model.revision, token=hub_token)
            check_max_model_len(config, self.files)
            self.process.send(launch_message(with_absolute_trace(at_commit(config, self.files)), catalogue))
        except BaseException:
            self.stop()
            raise

    def wait(self) -> EngineFacts:
        """Until the engine takes requests; raises what its start raised."""
        ready = self.process.wait_until_ready(self._on_progress)
        return EngineFacts(
            files=self.files,
            report=report_from_message(ready.report),
            max_model_len=ready.max_model_len,
            num_blocks=ready.num_blocks,
            metadata_type=self._metadata_type,
        )

    def stop(self) -> None:
        """End the process now."""
        self.process.stop(grace=0)
        self.process.close()
