"""The tool service: executes what agents ask for, in sandboxes. `tool_service.base` says what a tool is."""
