"""Order something, as a customer would, and wait until it is packed: `python order.py hat`."""

import sys

from wsgi import app, umbel


def main(name: str) -> None:
    answer = app.test_client().post(f"/orders/{name}").get_json()
    print(answer.get("problem") or umbel.AsyncResult(answer["task"]).get(timeout=60))


if __name__ == "__main__":
    main(sys.argv[1])
