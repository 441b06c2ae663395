"""Send some mails at once and print what became of each."""

from tasks import MailRefused, app, send_mail

RECIPIENTS = (
    "ada@example.org",
    "edsger@example.org",
    "grace@example.org",
    "margaret@example.org",
    "nobody@nowhere.example",
)


def main() -> None:
    calls = [send_mail.s(recipient, "Your order", "It is on its way.") for recipient in RECIPIENTS]
    for recipient, result in zip(RECIPIENTS, app.send_many(calls), strict=True):
        try:
            attempt = result.get(timeout=60)
        except MailRefused as error:
            print(f"{recipient:<24} not sent: {error}")
        else:
            print(f"{recipient:<24} sent at attempt {attempt}")
    app.close()


if __name__ == "__main__":
    main()
