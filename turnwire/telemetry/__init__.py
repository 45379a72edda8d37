"""What an operator sees of a service: metrics, traces, logs.

`config` has the settings, each off or plain by default. `metrics` serves what Prometheus reads, `rpcs` counts calls,
`gpu` asks the devices; what a service itself exports is in its own `telemetry.py`. `tracing` makes one trace of one
trajectory across the services. `logs` writes lines that carry the ids of what they are about.

Invariant: labels and attributes hold names, kinds, counts and ids; never what a policy or a tool wrote, and no secret.
"""
