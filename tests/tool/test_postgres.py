"""The `sql` tool on a real PostgreSQL server: what the agent sees, exactly, and what is left when it has gone."""

import pytest
from postgres_harness import session
from tool_harness import Service, error_of, text_of

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.needs("isolated-sandbox", "postgres"),
    pytest.mark.usefixtures("nothing_left"),
]


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("select name from customers order by id", "name\nBamo\nKuti"),
        ("select total from orders order by id", "total\n10.50\n4.25\n99.00"),
        ("select * from orders where id = 7", "id | customer_id | total | size\n(0 rows)"),
        ("select 1 as one, null as none, 'a\nb' as text, true as yes", "one | none | text | yes\n1 | NULL | a\\nb | t"),
        ("select i from generate_series(1, 7) i", "i\n1\n2\n3\n4\n5\n(2 more rows)"),
        ("select i from generate_series(1, 90) i", "i\n1\n2\n3\n4\n5\n(at least 16 more rows)"),
        ("update orders set total = 0", "(3 rows changed)"),
        ("insert into customers values (3, 'Ada') returning name", "name\nAda"),
        ("create table t(a int)", "(0 rows changed)"),
        ("", "(0 rows changed)"),
        ("select 1 as a; -- and no more", "a\n1"),
        (
            ".schema",
            "customers: 2 rows\n  id integer, primary key\n  name text, not null\n"
            "orders: 3 rows\n  id integer, primary key\n  customer_id integer, not null, references customers(id)\n"
            "  total numeric(10,2)\n  size size\ntotals: view\n  customer_id integer\n  total numeric",
        ),
        (".schema totals", "totals: view\n  customer_id integer\n  total numeric"),
    ],
)
async def test_a_statement_is_answered_with_a_header_and_rows(
    postgres_service: Service, statement: str, text: str
) -> None:
    (observation,) = await session(postgres_service, statement)
    assert (text_of(observation), error_of(observation)) == (text, "")


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        (
            "select nme from customers",
            'error: column "nme" does not exist\nLINE 1: select nme from customers\n               ^\n'
            'HINT: Perhaps you meant to reference the column "customers.name".',
        ),
        ("selec 1", 'error: syntax error at or near "selec"\nLINE 1: selec 1\n        ^'),
        (
            "insert into customers values (1, 'again')",
            'error: duplicate key value violates unique constraint "customers_pkey"\n'
            "DETAIL: Key (id)=(1) already exists.",
        ),
        (
            "select 1; select 2",
            "error: cannot insert multiple commands into a prepared statement\nHINT: One call takes one statement.",
        ),
        (".schema nowhere", "error: no such table: nowhere"),
    ],
)
async def test_errors_are_as_the_database_says_them(postgres_service: Service, statement: str, text: str) -> None:
    (observation,) = await session(postgres_service, statement)
    assert (text_of(observation), error_of(observation)) == (text, "TOOL_ERROR")


async def test_data_has_values_for_programs(postgres_service: Service) -> None:
    statement = (
        "select 1::bigint, 2.5::float8, 'NaN'::float8, 10.50::numeric, 12345678901234567890::numeric, true, "
        "null, '\\x00ff'::bytea, repeat('é', 40), '2020-01-02'::date"
    )
    (observation,) = await session(postgres_service, statement)
    (row,) = [list(row) for row in observation.data["rows"]]
    plain = [dict(cell) if hasattr(cell, "items") else cell for cell in row]
    assert plain == [
        1,
        2.5,
        {"float": "nan"},
        10.5,
        "12345678901234567890",
        True,
        None,
        {"blob": "00ff", "bytes": 2},
        {"text": "é" * 32, "bytes": 80},
        "2020-01-02",
    ]
    assert text_of(observation).endswith(" | " + "é" * 32 + "... (80 bytes) | 2020-01-02")
