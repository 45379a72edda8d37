# ruff: noqa: E501 - statements are data
"""What an agent may try who may only read, and what one may who owns the objects of its database.

Ids begin with rows of the hostile inputs' list.
"""

from postgres_steps import DENIED, ERROR, LOST, MEMORY, TIMEOUT, Step, denied, mixed, no, ok

CATCHER = "do $$ begin loop begin perform pg_sleep(99); exception when query_canceled then null; end; end loop; end $$"


def filling(statement: str) -> str:
    """One that runs another 200 times, with the role's name and a megabyte of noise."""
    noise = "select string_agg(md5(random()::text || i), '') from generate_series(1, 30000) i"
    return (
        f"do $$ declare noise text; begin {noise} into noise; for i in 1..200 loop "
        f"execute format('{statement}', current_user, lpad(i::text, 8, '0') || noise); end loop; end $$"
    )


READ_ONLY: dict[str, tuple[Step, ...]] = {
    "I6-languages": (
        *denied("do $$ begin null; end $$", "do language plpgsql $$ begin loop null; end loop; end $$"),
        ok("select * from totals order by 1", "14.75"),
    ),
    "I13-read-only": (
        ok("set default_transaction_read_only = off"),
        ok("set session characteristics as transaction read write"),
        *denied(
            "insert into customers values (9, 'x')",
            "update customers set name = 'x'",
            "delete from orders",
            "truncate orders",
            "with d as (delete from orders returning *) select * from d",
            "select * from customers for update",
            "select nextval('orders_id_seq')",
            "select setval('orders_id_seq', 1)",
            "create table t(a int)",
            "create temp table t(a int)",
            "create function f() returns int language sql as 'select 1'",
            "select gain()",
            "select gain('', '')",
            "select gains('')",
        ),
        no("drop table orders", "must be owner"),
        no("alter table orders add column x int", "must be owner"),
        no("create view v as select 1", DENIED),
        no("comment on table orders is 'x'", "must be owner"),
        ok("grant insert on orders to current_user"),
        ok("begin read write"),
        no("lock table customers in exclusive mode", DENIED),
        ok("rollback"),
        ok("begin read write"),
        no("delete from orders", DENIED),
        ok("rollback"),
        ok("select count(*) from customers", "2"),
        ok("select * from totals order by 1", "14.75"),
    ),
}

READ_WRITE: dict[str, tuple[Step, ...]] = {
    # a reader has no language in which to write these
    "I1-catches-the-cancel": (
        no(
            "do $$ begin loop begin perform pg_sleep(100); exception when query_canceled then null; end; end loop; end $$",
            "timeout",
            TIMEOUT,
        ),
        ok("select 1", "1"),
    ),
    "I1-in-triggers": (
        ok("create function f() returns trigger language plpgsql as $$ begin perform pg_sleep(99); return new; end $$"),
        ok(
            "create constraint trigger t after insert on orders deferrable initially deferred for each row execute function f()"
        ),
        ok("begin"),
        ok("insert into orders values (99, 1)"),
        no("commit", "timeout", TIMEOUT),
        ok("select count(*) from orders", "3"),
    ),
    "I1-in-definitions": (
        ok("create function f(int) returns int immutable language sql as 'select pg_sleep(99); select 1'"),
        ok("create table g(a int, b int generated always as (f(a)) stored)"),
        no("insert into g values (1)", "timeout", TIMEOUT),
        no("create index on customers(f(id))", "timeout", TIMEOUT),
        ok("create policy p on customers using (f(id) = 1)"),
        ok("alter table customers force row level security, enable row level security"),
        no("select * from customers", "timeout", TIMEOUT),
        ok("create domain d as int check (f(value) = 1)"),
        no("select 1::d", "timeout", TIMEOUT),
    ),
    "I1-locked-out": (
        ok(
            "do $$ begin execute format('alter role %I in database %I set statement_timeout = 1', current_user, current_database()); end $$"
        ),
        ok("do $$ begin execute format('alter role %I set default_transaction_read_only = on', current_user); end $$"),
        no(CATCHER, "timeout", TIMEOUT),
        ok("delete from orders", "3 rows"),
    ),
    "I1-errors-raised": (
        ok("set exit_on_error = on"),
        no("do $$ begin raise exception 'ours' using errcode = '57P01'; end $$", "ours", LOST),
        ok("set exit_on_error = on"),
        no("do $$ begin raise exception 'ours' using errcode = '53100'; end $$", "ours", LOST),
        no("do $$ begin raise exception '%', repeat('y', 20000000); end $$", "yyy"),
        ok("do $$ begin for i in 1..2000 loop raise notice '%', repeat('z', 10000); end loop; end $$"),
        no("do $$ begin raise exception 'ours' using errcode = '53100'; end $$", "ours"),
        no("do $$ begin raise exception 'ours' using errcode = '57P01'; end $$", "ours"),
    ),
    "I3-files-of-search": (
        no(
            "create text search dictionary d (template = ispell, dictfile = '../../../etc/passwd')",
            "invalid text search",
        ),
        no("create text search dictionary d (template = simple, stopwords = '/etc/passwd')", "invalid text search"),
        no("create function f() returns int language c as '/lib/x', 'y'", DENIED),
        no("create function f() returns int language internal as 'now'", DENIED),
        no("create tablespace t location '/tmp'", DENIED),
    ),
    "I6-objects": (
        ok("create function f() returns event_trigger language plpgsql as $$ begin end $$"),
        no("create event trigger e on ddl_command_end execute function f()", DENIED),
        no("create type t (input = int4in, output = int4out)", "must be superuser"),
        no("create operator class o for type int using btree as operator 1 <", "must be superuser"),
        no("create access method m type table handler heap_tableam_handler", DENIED),
        no("create cast (text as int) without function as implicit", "must be owner"),
        no("create language l handler f", "must be superuser"),
        no("create server s foreign data wrapper w", "does not exist"),
        no("alter table customers owner to postgres", "must be member"),
        ok("create aggregate a(text) (sfunc = textcat, stype = text, initcond = 'x')"),
        no("select a(repeat('x', 1000000)) from generate_series(1, 10000)", "", MEMORY, TIMEOUT),
        ok("create rule r as on insert to customers do also insert into customers values (new.id + 1, 'x')"),
        no("insert into customers values (9, 'x')", "infinite recursion"),
        ok("create function r(int) returns int language sql as 'select 1'"),
        ok("create or replace function r(int) returns int language sql as 'select r($1 + 1)'"),
        no("select r(1)", "stack depth"),
    ),
    "I6-shadows": (
        ok("create operator public.= (leftarg = int, rightarg = int, function = int4ne)"),
        ok("create operator public.~ (leftarg = name, rightarg = text, function = nameregexne)"),
        ok(
            "create function public.format(text, variadic text[]) returns text language sql as $$ select 'drop table customers' $$"
        ),
        ok(
            "create function public.has_table_privilege(oid, text) returns bool language sql as 'select pg_sleep(99); select true'"
        ),
        ok("create view public.pg_class as select 1 as oid"),
        ok("set search_path = public, pg_catalog"),
        ok("select 1 = 1", "f"),
        ok(".schema customers", "customers: 2 rows"),
        ok("drop schema public cascade"),
        ok(".schema", "(no tables)"),
    ),
    "I7-temporary": (
        no(
            "create temp table t as select repeat(md5(random()::text), 1000) from generate_series(1, 1000000)",
            "",
            LOST,
            TIMEOUT,
        ),
        ok("select count(*) from customers", "2"),
        no("create unlogged table u as select generate_series(1, 100000000)", "", LOST, TIMEOUT),
        ok("select count(*) from customers", "2"),
    ),
    "I8-floods": (
        *mixed(
            "do $$ begin for i in 1..20000 loop execute format('prepare p%s as select %s', i, i); end loop; end $$",
            "do $$ begin for i in 1..20000 loop execute format('declare c%s cursor with hold for select 1', i); end loop; end $$",
            "do $$ begin for i in 1..20000 loop execute format('create temp sequence s%s', i); end loop; end $$",
            "do $$ begin for i in 1..9000 loop execute format('notify x, %L', i || repeat('y', 7900)); end loop; end $$",
        ),
        no("do $$ begin for i in 1..9 loop perform pg_advisory_lock(i); end loop; end $$", DENIED),
        no("do $$ begin copy customers to stdout; end $$", "cannot COPY"),
    ),
    "I13-own-copy": (
        ok("drop view totals"),
        ok("drop aggregate gains(text)"),
        ok("truncate orders"),
        ok("alter table customers add column age int"),
        ok("create index on customers(name)"),
        ok("create table t as select * from customers", "2 rows changed"),
        ok("create temp table u(a int)"),
        ok("insert into orders(customer_id) values (1)", "1 row changed"),
        ok("select gain()", "turnwire_"),
        ok("drop table orders"),
        ok("create function twice(i int) returns int language plpgsql as $$ begin return 2 * i; end $$"),
        ok("select twice(21)", "42"),
        no("drop database shop", "must be owner"),
        no("drop database template1", "must be owner"),
        no("create database mine template shop", DENIED),
        no("alter role postgres password 'x'", ""),
    ),
    "I6-own-definer": (
        ok("create function f() returns text language sql security definer as 'select current_user::text'"),
        ok("select f()", "turnwire_"),
        ok("create function pg_database_size(text) returns bigint language sql as 'select 1'"),
        ok("set search_path = public, pg_catalog"),
        ok(".schema customers", "customers: 2 rows"),
    ),
    "I8-locks-of-all": (
        no(
            "do $$ begin for i in 1..200000 loop execute format('create table t%s(a int)', i); end loop; end $$",
            "",
            MEMORY,
            TIMEOUT,
            ERROR,
            LOST,
        ),
        ok("select 1"),
    ),
    "I7-fills-the-disk": (
        no(
            "create table big as select repeat(md5(i::text), 60) from (select generate_series(1, 1000000000) i) x",
            "grew past",
            LOST,
        ),
        ok("select count(*) from customers", "2"),
    ),
    "I7-files-without-a-byte": (
        no(
            "do $$ begin for i in 1..50000 loop execute format('create table t%s()', i); if i % 100 = 0 then commit; end if; end loop; end $$",
            "grew past",
            LOST,
        ),
        ok(".schema", "customers: 2 rows"),
    ),
    "I7-fills-the-disk-beside-its-database": (
        no(filling("alter role %I set application_name = %L"), "grew past", LOST),
        ok("select count(*) from customers", "2"),
        no(filling(f"alter role %I password ''SCRAM-SHA-256$4096:%s${'A' * 43}=:{'A' * 43}=''"), "grew past", LOST),
        ok("select count(*) from customers", "2"),
    ),
    "I12-ddl-flood": (
        ok("create table wide(" + ", ".join(f"c{i} int" for i in range(1600)) + ")"),
        no("create table wider(" + ", ".join(f"c{i} int" for i in range(1601)) + ")", "1600"),
        ok(".schema", "customers: 2 rows"),
    ),
    "I1-cannot-be-stopped": (  # nothing ends a COMMIT of many LISTENs, which takes time by the square of their number
        no("do $$ begin for i in 1..80000 loop execute 'listen c' || i; end loop; end $$", "timeout", TIMEOUT),
        no("select 1 as one", "", LOST, ""),
        ok("select count(*) from pg_listening_channels()", "0"),
    ),
}
