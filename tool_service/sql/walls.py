"""What keeps a trajectory in its database: roles without rights, and statements that the superuser runs.

Two roles: the *owner* owns the objects of the database and runs `init_sql`; the *reader* may only SELECT, and is the
agent's where the database is read-only. Where it is not, the agent is the owner. So what the agent may do follows from
rights, which it cannot change, and never from settings, which it can. Neither role owns the database itself, nor may
the agent create in it, so it cannot make extensions, schemas or publications. Nobody else may connect to it.

Invariant: once a trajectory's role has connected, nothing runs in its database with more rights than its own, since
there it could be led into functions of the trajectory's making.
"""

# ruff: noqa: S608 - names are of our making

from __future__ import annotations

ROLE_SETTINGS = {
    "statement_timeout": "15min",  # the service stops a statement at its turn's deadline: this is for its death
    "client_connection_check_interval": "2s",
    "idle_in_transaction_session_timeout": "30min",
    "lock_timeout": "10s",
    "client_min_messages": "error",
    "log_min_messages": "panic",  # an agent's errors are no news, and must not fill the server's log
    "max_parallel_workers_per_gather": "0",
    "jit": "off",
}
"""Of both roles, beside temp_file_limit. A role may change the time limits for itself: outside deadlines decide."""


def quoted(name: str) -> str:
    """An identifier."""
    return '"' + name.replace('"', '""') + '"'


def create_role(role: str) -> str:
    return (
        f"CREATE ROLE {role} NOLOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOINHERIT NOREPLICATION NOBYPASSRLS "
        "CONNECTION LIMIT 1"
    )


def admit(role: str, database: str, verifier: str, temp_bytes: int) -> list[str]:
    """Let a role log in, with its settings as they should be: a role may change its own, and its own password."""
    settings = {**ROLE_SETTINGS, "temp_file_limit": f"{temp_bytes // 1024}kB"}
    return [
        f"ALTER ROLE {role} RESET ALL",
        f"ALTER ROLE {role} IN DATABASE {database} RESET ALL",
        *(f"ALTER ROLE {role} SET {name} = '{value}'" for name, value in settings.items()),
        f"ALTER ROLE {role} LOGIN PASSWORD '{verifier}'",
        f"GRANT CONNECT ON DATABASE {database} TO {role}",
    ]


def may_create(owner: str, database: str, allowed: bool) -> str:
    """Schemas and trusted extensions: only while `init_sql` runs."""
    return f"{'GRANT' if allowed else 'REVOKE'} CREATE ON DATABASE {database} {'TO' if allowed else 'FROM'} {owner}"


def hand_over(database: str, role: str) -> list[str]:
    """Make a database that was built a trajectory's, whose agent acts as `role`: as the owner, who has the database's
    name, or as a reader."""
    if role == database:
        return [f"GRANT TEMPORARY ON DATABASE {database} TO {role}"]
    return [create_role(role)]


def build(owner: str, database: str) -> str:
    """A script for the new database, before anybody else may connect to it: PUBLIC loses what reaches beyond the
    database, or is of no use to a reader; the template's objects become the owner's."""
    return f"""
SET search_path = pg_catalog;
REVOKE ALL ON DATABASE {database} FROM PUBLIC;
GRANT CONNECT ON DATABASE {database} TO {owner};
DO $walls$
DECLARE statement text;
BEGIN
    FOR statement IN
        SELECT format('REVOKE ALL ON TABLE %s FROM PUBLIC', oid::regclass) FROM pg_class
        WHERE relnamespace = 'pg_catalog'::regnamespace
          AND (relkind = 'r' AND relisshared OR relkind = 'v' AND relname ~ '{_VIEWS_BEYOND}')
      UNION ALL
        SELECT format('REVOKE ALL ON ROUTINE %s FROM PUBLIC', oid::regprocedure) FROM pg_proc
        WHERE pronamespace = 'pg_catalog'::regnamespace AND proname ~ '{_FUNCTIONS_BEYOND}'
      UNION ALL
        SELECT format('REVOKE ALL ON ROUTINE %s FROM PUBLIC', p.oid::regprocedure) FROM pg_proc p
        JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
        JOIN pg_extension e ON e.oid = d.refobjid
        WHERE e.extname IN ('dblink') OR p.prosecdef
      UNION ALL
        SELECT format('REVOKE ALL ON LANGUAGE %1$I FROM PUBLIC; GRANT USAGE ON LANGUAGE %1$I TO {owner}', lanname)
        FROM pg_language WHERE lanpltrusted
      UNION ALL
        SELECT format('REVOKE ALL ON SCHEMA %I FROM PUBLIC', nspname) FROM pg_namespace WHERE {_OURS}
      UNION ALL
        SELECT format('ALTER SCHEMA %I OWNER TO {owner}', nspname) FROM pg_namespace WHERE {_OURS}
      UNION ALL
        SELECT format('ALTER TABLE %s OWNER TO {owner}', c.oid::regclass)
        FROM pg_class c JOIN pg_namespace ON pg_namespace.oid = c.relnamespace
        WHERE {_OURS} AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
          AND NOT EXISTS (
              SELECT FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.objsubid = 0
              AND (d.deptype = 'e' OR c.relkind = 'S' AND d.deptype IN ('a', 'i')))
      UNION ALL
        SELECT format('ALTER ROUTINE %s OWNER TO {owner}', p.oid::regprocedure)
        FROM pg_proc p JOIN pg_namespace ON pg_namespace.oid = p.pronamespace
        WHERE {_OURS}
          AND NOT EXISTS (
              SELECT FROM pg_depend d
              WHERE d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype IN ('e', 'i'))
      UNION ALL
        SELECT format('ALTER TYPE %s OWNER TO {owner}', t.oid::regtype)
        FROM pg_type t JOIN pg_namespace ON pg_namespace.oid = t.typnamespace
        WHERE {_OURS}
          AND (t.typtype IN ('d', 'e', 'r') OR (SELECT relkind = 'c' FROM pg_class WHERE oid = t.typrelid))
          AND NOT EXISTS (
              SELECT FROM pg_depend d
              WHERE d.classid = 'pg_type'::regclass AND d.objid = t.oid AND d.deptype = 'e')
    LOOP
        EXECUTE statement;
    END LOOP;
END $walls$;
"""


def let_read(reader: str) -> str:
    """A script that the owner runs, when `init_sql` is done: the reader may read, and do nothing else.

    No routine stays SECURITY DEFINER: to revoke it would not do, since aggregates, casts and types call theirs without
    asking for the reader's rights.
    """
    return f"""
SET search_path = pg_catalog, pg_temp;
DO $walls$
DECLARE statement text;
BEGIN
    FOR statement IN
        SELECT format('REVOKE ALL ON SCHEMA %1$I FROM PUBLIC; GRANT USAGE ON SCHEMA %1$I TO {reader}', nspname)
        FROM pg_namespace WHERE {_OURS} AND nspowner = current_user::regrole
      UNION ALL
        SELECT format('REVOKE ALL ON TABLE %1$s FROM PUBLIC; GRANT SELECT ON TABLE %1$s TO {reader}', oid::regclass)
        FROM pg_class WHERE relowner = current_user::regrole AND relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
          AND relpersistence <> 't'
      UNION ALL
        SELECT format('ALTER ROUTINE %s SECURITY INVOKER', oid::regprocedure)
        FROM pg_proc WHERE prosecdef AND proowner = current_user::regrole
    LOOP
        EXECUTE statement;
    END LOOP;
END $walls$;
"""


_OURS = "nspname !~ '^pg_' AND nspname <> 'information_schema'"

_VIEWS_BEYOND = (
    "^(pg_roles|pg_user|pg_user_mappings|pg_group|pg_shadow|pg_locks|pg_prepared_xacts|pg_replication_.*"
    "|pg_stat_(activity|archiver|bgwriter|database.*|gssapi|io|progress_.*|recovery.*|replication.*|slru|ssl"
    "|subscription.*|wal.*|checkpointer))$"
)
"""Views on what the server does for others: who is there, what they run, what they are called."""

_FUNCTIONS_BEYOND = (
    "^(lo_.*|loread|lowrite"  # large objects: their makers need no right
    "|pg_(try_)?advisory_.*"  # their locks take room in a table that all databases share
    "|pg_(cancel|terminate)_backend|pg_notify|pg_logical_emit_message|pg_export_snapshot"
    "|pg_stat_get_(activity|backend_.*|progress_info|db_.*)|pg_lock_status|pg_prepared_xact|pg_blocking_pids"
    "|pg_safe_snapshot_blocking_pids|pg_stat_get_wal_.*|pg_control_.*|pg_isolation_test_.*)$"
)
"""Functions that reach beyond the database, or take from what all share."""
