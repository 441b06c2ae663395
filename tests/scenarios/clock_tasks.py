"""Tasks that say where they ran; one is tried again."""

from umbel import App, Task

app = App("clock")


@app.task(bind=True)
def who(self: Task[[], str]) -> str:
    return str(self.request.hostname).partition("@")[0]


@app.task(bind=True, max_retries=2)
def again(self: Task[[], int]) -> int:
    if self.request.retries == 0:
        self.retry(countdown=0.2)
    return self.request.retries
