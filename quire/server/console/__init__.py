"""The console: a page in the browser that shows what the engine does. `docs/console.md` describes it."""
