"""The engine: its loop, the driver of the loop, and what a front end does before and after it. Imports no torch.

A front end reaches an engine in one of three ways:

- in its own thread: InprocClient drives an EngineCore of this process;
- in its own thread, with the engine in a process of its own: InprocClient drives a RemoteEngine, an EngineCore as well;
- from an event loop: AsyncClient on an EngineLink, which is an EngineThread of this process or an EngineProcessLink.
"""
