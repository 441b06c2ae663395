"""What reads like a secret, in a hundred spellings and more, and what does not."""

import json
import random
from time import process_time

import pytest

from umbel.protocol.delivery.redaction import TEXT_MAX, is_secret, redact
from umbel.protocol.delivery.sensitive import MASK

WORD, NUMBER = "hunter2", "493021"
BODY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7"
PEM = f"-----BEGIN PRIVATE KEY-----\n{BODY}\n{BODY}\n-----END PRIVATE KEY-----"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"

ASSIGNED = [
    "password=hunter2",
    "password = hunter2",
    "password: hunter2",
    "password:hunter2",
    "password := hunter2",
    "password => hunter2",
    "password -> hunter2",
    "PASSWORD=hunter2",
    "Password: 'hunter2'",
    'password="hunter2"',
    "{'password': 'hunter2', 'user': 'ann'}",
    '{"password": "hunter2"}',
    '{"password":"hunter2"}',
    "{'password': b'hunter2'}",
    "('password', 'hunter2')",
    "[('db_password', 'hunter2'), ('n', 1)]",
    "login(user='ann', password='hunter2')",
    "user_password='it\\'s hunter2'",
    "passwd=hunter2",
    "pwd=hunter2",
    "db_pass: hunter2",
    "pass=hunter2",
    "passphrase=hunter2",
    "passcode=hunter2",
    "Passwort: hunter2",
    "Kennwort = hunter2",
    "contraseña: hunter2",
    "contrasena=hunter2",
    "senha=hunter2",
    "wachtwoord: hunter2",
    "PGPASSWORD=hunter2 psql",
    "MYSQL_ROOT_PASSWORD: hunter2",
    "spring.datasource.password=hunter2",
    "password[0]=hunter2",
    "password for ann: hunter2",
    "passwords: ['hunter2', 'x']",
    "secret=hunter2",
    "client_secret: hunter2",
    "AWS_SECRET_ACCESS_KEY=hunter2",
    "token=hunter2",
    "accessToken: 'hunter2'",
    "refresh-token=hunter2",
    "csrf_token=hunter2",
    "{'X-Api-Key': 'hunter2'}",
    "api key: hunter2",
    "apikey=hunter2",
    "private_key=hunter2",
    "accountKey=hunter2;EndpointSuffix=x",
    "encryption_key=hunter2",
    "signing-key: hunter2",
    "ssh_key=hunter2",
    "credentials=hunter2",
    "Authorization: hunter2",
    "Authorization: Bearer hunter2",
    "Authorization: Basic hunter2",
    "Proxy-Authorization: Digest hunter2",
    "{'authorization': 'Token hunter2'}",
    "auth=('ann', 'hunter2')",
    "Cookie: session=hunter2",
    "Set-Cookie: id=hunter2",
    "sessionid=hunter2",
    "session_id: hunter2",
    "signature=hunter2",
    "https://x.example/blob?se=2027&sig=hunter2",
    "connection_string=hunter2",
    "jwt=hunter2",
    "SENTRY_DSN=hunter2",
    "mnemonic: 'hunter2 zoo zoo'",
    "seed phrase: hunter2",
    r'{"body": "{\"password\": \"hunter2\", \"n\": 1}"}',
    r'{"body": "{\"password\": \"a\\\"hunter2\"}"}',
    r"""'{"body": "{\\"token\\": \\"hunter2\\"}"}'""",
    "<password>hunter2</password>",
    '<ns:Password Type="Text">hunter2</ns:Password>',
    "mysql --password hunter2 --host h",
    "curl --token 'hunter2' x",
    "['--db-password', 'hunter2']",
    "--api-key=hunter2",
    "redis://user:hunter2@host/0",
    "redis://:hunter2@host",
    "amqp://user:hunter2",
    "https://ann:p@hunter2@host/",
    "otp=493021",
    "{'otp': 493021}",
    "totp_code: 493021",
    "pin=493021",
    "PIN: 493021",
    '{"pin": "493021"}',
    "{'userPin': 493021}",
    "pin_code=493021",
    "card_pin: 493021",
    "pincode='493021'",
    "cvv=493021",
    "cvc2: 493021",
    "mfa: 493021",
    "2fa=493021",
    "verification_code=493021",
    "{'security-code': 493021}",
    "one_time_password=493021",
    "oneTimeCode: 493021",
    "backup_codes=['493021', '1']",
]
SPOKEN = [
    "password hunter2",
    "the password is hunter2",
    "your password is: hunter2",
    "password was hunter2.",
    "password 'hunter2' was rejected",
    'wrong password "hunter2"',
    "password `hunter2` does not match",
    "login with password hunter2 failed",
    "password for ann is hunter2",
    "password of ann@example.org: hunter2",
    "new password is now hunter2",
    "(password hunter2)",
    "passphrase hunter2",
    "pwd hunter2",
    "passcode is hunter2",
    "Passwort hunter2",
    "password equals hunter2",
    "password\thunter2",
    "PIN 493021",
    "pin is 493021",
    "the PIN for card 7 is 493021",
    "pin code 493021",
    "pin number: 493021",
    "PIN '493021' is wrong",
    "OTP 493021 was sent",
    "otp is 493021",
    "the verification code is 493021",
    "security code 493021",
    "one-time code: 493021",
    "one time code is 493021",
    "2FA code 493021",
    "two-factor code is 493021",
    "login code: 493021",
    "sms code 493021",
    "recovery code a1b2-493021",
    "your code is 493021",
    "your Umbel login code is 493021",
    "493021 is your verification code",
    "493021 is your Umbel code",
    "Use 493021 as your PIN",
    "cvv 493021",
]
FORMED = [
    f"Bearer {JWT}",
    "bearer 0123456789abcdef-hunter2",
    "sent Bearer abc.def.hunter2/0= to x",
    "Basic YW5uOmh1bnRlcjI=hunter2=",
    f"payload {JWT} ends",
    "eyJhbGciOiJub25lIn0.eyJzdWIiOiJodW50ZXIyIn0hunter2.",
    "ghp_hunter2hunter2hunter2hunter2hunter2",
    "github_pat_11ABCDEFG0hunter2hunter2hunter2",
    "glpat-hunter2hunter2hunter2",
    "xoxb-123456789-hunter2hunter2",
    "AKIAIOSFODNN7EXAMPLE hunter2x".replace(" hunter2x", ""),
    "AIzaSyhunter2hunter2hunter2hunter2hunter2",
    "sk_live_hunter2hunter2",
    "sk-proj-hunter2hunter2hunter2",
    "npm_hunter2hunter2hunter2hunter2",
    "pypi-AgEIcHlwaS5vcmchunter2",
    "SG.hunter2hunter2.hunter2hunter2",
    "whsec_hunter2hunter2",
    "hf_hunter2hunter2hunter2",
    "shpat_hunter2hunter2hunter2",
    "AGE-SECRET-KEY-1HUNTER2HUNTER2HUNTER2",
    "umbel_hunter2hunter2hunter2hunter2",
    PEM,
    PEM.replace("PRIVATE", "RSA PRIVATE"),
    PEM.replace("PRIVATE", "ENCRYPTED PRIVATE"),
    PEM.replace("PRIVATE", "OPENSSH PRIVATE"),
    PEM.replace("PRIVATE KEY", "PGP PRIVATE KEY BLOCK"),
    PEM.replace("-----B", "---- B").replace("-----E", "---- E"),
    repr(PEM),
    json.dumps({"pem": PEM}),
    json.dumps(json.dumps({"pem": PEM})),
    f"loading {PEM.partition('-----END')[0]}",
    f"{PEM.partition('BEGIN PRIVATE KEY-----')[2]} was loaded",
    f"one {PEM} two {PEM} three",
]


def test_the_table_is_long_enough_and_has_nothing_twice() -> None:
    texts = [*ASSIGNED, *SPOKEN, *FORMED]
    assert len(texts) == len(set(texts)) >= 150


@pytest.mark.parametrize("text", [*ASSIGNED, *SPOKEN, *FORMED])
def test_a_secret_goes_however_it_is_written(text: str) -> None:
    for around in (text, f"x {text} y", f"Error: {text}\nnext line", f"[{text}]"):
        clean = redact(around)
        assert MASK in clean
        for secret in (WORD, WORD.upper(), NUMBER, BODY, JWT, "FODNN7", "IcHlwaS5v"):
            assert secret not in clean, clean


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("{'password': 'hunter2', 'user': 'ann'}", "{'password': ***, 'user': 'ann'}"),
        ("login with password hunter2 failed", "login with password *** failed"),
        ("password for ann is hunter2.", "password for ann is ***"),
        ("the PIN for card 7 is 493021, try 3", "the PIN for card 7 is ***, try 3"),
        ("493021 is your verification code", "*** is your verification code"),
        ("sent Bearer abc.def-123 to x", "sent Bearer *** to x"),
        (f"loaded {PEM} from disk", "loaded *** from disk"),
        (f"one {PEM} two {PEM} three", "one *** two *** three"),
        ("<password>hunter2</password>", "<password>***</password>"),
        ("key AKIAIOSFODNN7EXAMPLE of ann", "key *** of ann"),
    ],
)
def test_the_rest_of_a_text_stays(text: str, clean: str) -> None:
    assert redact(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        "nothing to hide",
        "http://host:8080/path",
        "compass: north, passenger=3, bypass: yes",
        "('key', 5)",
        "key=5, monkey=3, keyboard='us'",
        "ping 10 times, spinning 1234, pinned=5, shipping_input=7",
        "password reset for ann",
        "the password is wrong",
        "password authentication failed for user ann",
        "password must have 12 characters",
        "passwords don't match",
        "forgot password?",
        "tests pass in CI, 12 pass",
        "status code 500, exit code 127, error code: 493021",
        "country_code=41, zip code 80331",
        "author=ann, authority: x, co-author 'bob'",
        "basic authentication failed",
        "the bearer of this letter",
        "otpauth is a scheme, option=3, adopt 1234",
        "task-received-at-the-worker-node",
        "risk-assessment-of-the-whole-project",
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
        "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----",
        "---- a line of dashes ----",
        "coding=utf-8, decode error at 1234, your decoder",
        "signal 9, design 1234, assign=5",
        "umbel_tasks_total, umbel_node_active",
        "0123456789abcdef0123456789abcdef",
        "2b4f6e3a-9c1d-4e5f-8a7b-1c2d3e4f5a6b",
        "shop.pay[1234] raised ValueError('invalid literal')",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "name",
    [
        *(
            "password",
            "userPassword",
            "db_pass",
            "pwd",
            "passphrase",
            "Authorization",
            "x-api-key",
            "privateKey",
        ),
        *(
            "secret",
            "client-secret",
            "token",
            "cookie",
            "credentials",
            "pin",
            "userPin",
            "PIN_CODE",
            "otp",
            "cvv",
        ),
        *("verification_code", "mfa", "2fa", "sessionid", "signature", "backupCodes", "connection string"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "ping",
            "spinner",
            "pinned",
            "passenger",
            "author",
            "authors",
            "author_id",
            "certificate_authority",
        ),
        *("keyboard", "key", "status_code", "country_code", "option", "adopted", "session", "design", "code"),
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)


def test_no_text_takes_long() -> None:
    """Each pattern is bounded: what is twice as long takes about twice as long, whatever it has in it."""
    random.seed(7)
    pieces = [
        *(
            "password ",
            "pass",
            "your ",
            "code ",
            "is ",
            "pin",
            "for x ",
            "-----BEGIN ",
            "-----END ",
            "PRIVATE KEY",
        ),
        *(
            "://",
            ":",
            "@",
            "=",
            '"',
            "'",
            "\\",
            "<password ",
            "<",
            ">",
            "eyJ",
            ".",
            "Bearer ",
            "a" * 50,
            " ",
            "-",
        ),
        *("1", "[", "{", "(", ",", "password for ", "verification ", "\n", "MII/+", "--token ", "sig="),
    ]
    texts = [piece * (TEXT_MAX // len(piece)) for piece in pieces]
    texts += ["".join(random.choices(pieces, k=9000)) for _ in range(20)]
    began = process_time()
    for text in texts:
        assert len(redact(text)) <= 2 * TEXT_MAX
    assert process_time() - began < 60.0


def test_no_more_than_the_limit_is_looked_at() -> None:
    assert len(redact("x" * 1_000_000)) == TEXT_MAX
