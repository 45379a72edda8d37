"""Who may call a service, what they may do there, and how much of it.

- `config`: what can be set, for servers and for clients.
- `tls`: certificates, read again when their files change.
- `tokens`: bearer tokens, known by their digests alone. A token is in no log line, error or repr.
- `roles`: the one table of which role a method needs.
- `quotas`: how much of a server one client may take.
- `gate`: the door that every call comes through: it asks all of these once, when the call begins.
"""
