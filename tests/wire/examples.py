"""What was captured from live Celery 5.7 traffic, as data. The numbers are sections of the wire facts."""

import json
from typing import Any

from umbel.wire.message import Message

TASK_ID = "2a91b34a-34ae-4cce-8eb3-93671edda338"
REPLY_TO = "e5d17151-a39b-3239-b559-ad6951ad970f"

# 1.4: headers as they stand in the envelope, and the body decoded.
HEADERS = (
    b'{"lang": "py", "task": "wapp.add", "id": "2a91b34a-34ae-4cce-8eb3-93671edda338", "shadow": null, '
    b'"eta": null, "expires": null, "group": null, "group_index": null, "retries": 0, '
    b'"timelimit": [null, null], "root_id": "2a91b34a-34ae-4cce-8eb3-93671edda338", "parent_id": null, '
    b'"argsrepr": "(2,)", "kwargsrepr": "{\'y\': 3}", "origin": "gen31794@vm", "ignore_result": false, '
    b'"replaced_task_nesting": 0, "stamped_headers": null, "stamps": {}}'
)
BODY = b'[[2], {"y": 3}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'
TASK = Message(HEADERS, BODY, correlation_id=TASK_ID, reply_to=REPLY_TO)

# 1.5: a value of each Python type that JSON does not know.
TYPED = (
    b'{"d": {"__type__": "datetime", "__value__": "2026-01-02T03:04:05+00:00"}, '
    b'"dd": {"__type__": "date", "__value__": "2026-01-02"}, '
    b'"t": {"__type__": "time", "__value__": "03:04:05"}, '
    b'"dec": {"__type__": "decimal", "__value__": "1.5"}, '
    b'"uu": {"__type__": "uuid", "__value__": {"hex": "00000000000000000000000000000005"}}, '
    b'"b": {"__type__": "bytes", "__value__": "hi"}, "b2": {"__type__": "base64", "__value__": "//4="}}'
)

# 1.7: the embed of a chain's first task.
CHAIN_EMBED: dict[str, Any] = json.loads("""
{"callbacks": null, "errbacks": null, "chord": null, "chain": [
 {"task": "wapp.add", "args": [4], "kwargs": {},
  "options": {"task_id": "2782f4c0-6341-4e4e-b0e1-6b6a30fe2f14",
              "reply_to": "e5d17151-a39b-3239-b559-ad6951ad970f"},
  "subtask_type": null, "immutable": false},
 {"task": "wapp.add", "args": [3], "kwargs": {},
  "options": {"task_id": "6cb947b6-1f82-4a29-bc63-5b3435961941",
              "reply_to": "e5d17151-a39b-3239-b559-ad6951ad970f"},
  "subtask_type": null, "immutable": false}]}
""")

# 1.8: a chord as a signature.
CHORD_SIGNATURE: dict[str, Any] = json.loads("""
{"task": "celery.chord", "args": [], "kwargs": {"kwargs": {}, "header": [
  {"task": "wapp.add", "args": [1, 2], "kwargs": {}, "options": {},
   "subtask_type": null, "immutable": false}],
  "body": {"task": "wapp.tsum", "args": [], "kwargs": {}, "options": {},
   "subtask_type": null, "immutable": false}},
 "options": {}, "subtask_type": "chord", "immutable": false}
""")

# 1.9: protocol v1.
V1_BODY = (
    b'{"task": "wapp.add", "id": "d9602d76-be18-4c4b-938b-7718f3f7d519", "args": [4, 5], "kwargs": {}, '
    b'"group": null, "group_index": null, "retries": 0, "eta": "2026-11-15T00:46:04.720981+00:00", '
    b'"expires": "2026-11-15T00:46:53.720981+00:00", "utc": true, "callbacks": null, "errbacks": null, '
    b'"timelimit": [null, null], "taskset": null, "chord": null}'
)

# 4.2: events.
HEARTBEAT = (
    b'{"hostname": "w1@vm", "utcoffset": 0.0, "pid": 30756, "clock": 2, "freq": 2.0, "active": 0, '
    b'"processed": 0, "loadavg": [2.18, 1.55, 0.71], "sw_ident": "py-celery", "sw_ver": "5.7.0", '
    b'"sw_sys": "Linux", "timestamp": 1794703091.0064845, "type": "worker-heartbeat"}'
)
EVENT_LIST = (
    b'[{"hostname": "w2@vm", "utcoffset": 0.0, "pid": 30768, "clock": 78, '
    b'"uuid": "2a91b34a-34ae-4cce-8eb3-93671edda338", "result": "5", "runtime": 0.016209315999958562, '
    b'"timestamp": 1794703129.1022427, "type": "task-succeeded"}]'
)

# 6.1: results.
SUCCESS = (
    b'{"status": "SUCCESS", "result": 5, "traceback": null, "children": [], '
    b'"date_done": "2026-11-15T00:38:49.083986+00:00", "task_id": "2a91b34a-34ae-4cce-8eb3-93671edda338"}'
)
FAILURE = (
    b'{"status": "FAILURE", "result": {"exc_type": "ValueError", "exc_message": ["boom"], '
    b'"exc_module": "builtins"}, "traceback": "Traceback \xe2\x80\xa6", "children": [], '
    b'"date_done": "2026-11-15T00:38:49.191999+00:00", "task_id": "555870ea-cba5-4fd9-9151-1a5cebe822fa"}'
)
STARTED = (
    b'{"status": "STARTED", "result": {"pid": 30758, "hostname": "w1@vm"}, "traceback": null, '
    b'"children": [], '
    b'"date_done": null, "task_id": "5cce4339-1ab5-4a64-b109-bee1e9bab181"}'
)
