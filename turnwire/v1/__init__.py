"""Generated from protos/turnwire/v1 by `make stubs`; do not edit."""
