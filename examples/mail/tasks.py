"""Send mail, and try again when the server asks for it."""

import os
import smtplib
from email.message import EmailMessage

from umbel import App, Task

app = App("mail")

HOST = os.environ.get("SMTP_HOST", "127.0.0.1")
PORT = int(os.environ.get("SMTP_PORT", "8025"))
SENDER = "shop@example.org"
TIMEOUT_S = 10.0


class MailRefused(Exception):
    """The server will never take this mail: trying again is no use."""


# The first wait is 0.2 s so that trying this out is quick; for a real server say 60.
@app.task(bind=True, max_retries=6, retry_backoff=0.2, retry_backoff_max=3600)
def send_mail(self: Task[..., int], recipient: str, subject: str, text: str) -> int:
    """Return the number of the attempt that succeeded."""
    try:
        with smtplib.SMTP(HOST, PORT, timeout=TIMEOUT_S) as server:
            server.send_message(_message(recipient, subject, text, message_id=self.request.id))
    except OSError as error:  # smtplib's errors are OSErrors, too
        code = _reply_code(error)
        if 500 <= code < 600:
            raise MailRefused(f"{recipient} was refused with {code}") from error
        self.retry(error)
    return self.request.retries + 1


def _message(recipient: str, subject: str, text: str, message_id: str) -> EmailMessage:
    """A mail that is sent twice has the same id twice, so that the recipient's program can tell."""
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = SENDER, recipient, subject
    message["Message-ID"] = f"<{message_id}@example.org>"
    message.set_content(text)
    return message


def _reply_code(error: OSError) -> int:
    """What the server said: 4xx for later, 5xx for never; 0 when it said nothing."""
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        return max(code for code, _ in error.recipients.values())
    return error.smtp_code if isinstance(error, smtplib.SMTPResponseException) else 0
