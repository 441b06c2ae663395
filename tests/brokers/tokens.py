"""Messages that carry tokens, so that each can be found wherever it is in Redis; hostile ones among them."""

import re
from binascii import a2b_base64
from collections import Counter

from tests.brokers.under_test import QUEUE
from tests.servers.redis import RedisServer
from umbel.wire.message import Message, Outgoing

FAR = 4102444800.0  # the year 2100
TOKEN = re.compile(rb"~(\d+)~")
SEALED = re.compile(rb'(?<="body":")([A-Za-z0-9+/]+=*)(?=")')  # of a dead letter that was sent once more

MARKS = [
    "x",
    "",
    '"starts": "x"',
    '"starts": 1e308',
    '"starts": -5',
    '"starts": 1.5',
    '"starts": null',
    '"starts": 3, "redelivered": 3',
    '"not_before": null',
    '"not_before": "soon"',
    '"not_before": nan',
    '"not_before": 1e400',
    '"not_before": -7',
    '"not_before": 9e99',
    f'"not_before": {FAR}',
    '"a": {"b": {}}, "starts": 1',
    '"a": [[[[',
]
HOSTILE = [
    *(f'{{"umbel": {{{mark}}}, "body": "~T~", "headers": {{}}, "properties": {{}}}}' for mark in MARKS),
    '{"umbel": {"starts": 1}}~T~',
    '{"umbel": {"starts": 1}, ~T~',
    '{"umbel": {~T~',
    '{"umbel": {}~T~}, ',
    '{"umbel": 3, "body": "~T~"}',
    '{"umbel": {"starts": 1}, "umbel": {x}, "body": "~T~"}',
    '{"body": "~T~", "headers": {"redelivered": 1}, "headers": {"delivery_info": {',
    "~T~",
    "{~T~",
    '"~T~"',
    "\0\xff~T~",
]
ALL_VALUES = """
local found = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local kind = redis.call('TYPE', key).ok
  local values = {}
  if kind == 'list' then values = redis.call('LRANGE', key, 0, -1) end
  if kind == 'hash' then values = redis.call('HVALS', key) end
  if kind == 'zset' then values = redis.call('ZRANGE', key, 0, -1) end
  if kind == 'stream' then
    for _, entry in ipairs(redis.call('XRANGE', key, '-', '+')) do
      for i = 1, #entry[2], 2 do
        if entry[2][i] == 'envelope' then values[#values + 1] = entry[2][i + 1] end
      end
    end
  end
  for _, value in ipairs(values) do found[#found + 1] = value end
end
return found
"""


def outgoing_of(token: int, queue: str = QUEUE, not_before: float = 0.0, priority: int = 0) -> Outgoing:
    headers = f'{{"task": "t", "id": "~{token}~"}}'.encode()
    return Outgoing(queue, Message(headers, b"body", priority=priority), not_before)


def token_in(text: bytes) -> int:
    (found,) = TOKEN.findall(text)
    return int(found)


def token_of(message: Message) -> int:
    return token_in(message.headers + message.body)


def tokens_in(server: RedisServer) -> Counter[int]:
    values = server.ask("EVAL", ALL_VALUES, 0)
    assert isinstance(values, list)
    texts = (SEALED.sub(lambda body: a2b_base64(body[1]), one) for one in values)
    return Counter(token_in(one) for one in texts if TOKEN.search(one))
