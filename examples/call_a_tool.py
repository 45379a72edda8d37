"""Call tools: once without state, then in a session that remembers.

turnwire up                                        # prints the addresses
python examples/call_a_tool.py 127.0.0.1:PORT      # of the tool service
"""

import sys

import turnwire
from turnwire.client import text_of, tool_call


def main(tools: str) -> None:
    with turnwire.connect(tools=tools) as there:
        for tool in there.tools.list_tools():
            print(f"{tool.name:8} {'healthy' if tool.healthy else tool.health_detail}")

        # One call. Arguments follow the tool's JSON schema; text in the tool's own syntax works as well.
        answer = there.tools.execute("python", arguments={"code": "sum(range(101))"})
        print("python says", text_of(answer.observations[0]))

        # A session is a trajectory: its variables and its database live until it is closed.
        database = {
            "init_sql": "create table fruit(name text, price int); insert into fruit values ('fig', 3), ('kiwi', 2);"
        }
        with there.tools.open("my-first-trajectory", {"python": None, "sql": database}) as session:
            session.act("I will keep a number. <python>x = 20</python>")
            turn = session.act("<python>x + 1</python> and <sql>select max(price) from fruit</sql>")
            for observation in turn.observations:
                print(f"{observation.tool} says {text_of(observation)!r}")

            # What an agent does wrong comes back as an observation it can learn from, not as an exception.
            wrong = session.act([tool_call("sql", query="select colour from fruit")])
            print("a mistake is answered:", text_of(wrong.observations[0]))


if __name__ == "__main__":
    main(sys.argv[1])
