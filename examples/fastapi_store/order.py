"""Order something, as a customer would, and wait until it is packed: `python order.py 42`."""

import json
import os
import sys
from urllib.request import Request, urlopen

SITE = f"http://127.0.0.1:{os.environ.get('PORT', '8000')}"


def main(number: str) -> None:
    with urlopen(Request(f"{SITE}/orders/{number}", method="POST")) as answer:
        task = json.load(answer)["task"]
    with urlopen(f"{SITE}/orders/{task}?wait_s=60") as answer:
        print(json.load(answer)["outcome"])


if __name__ == "__main__":
    main(sys.argv[1])
