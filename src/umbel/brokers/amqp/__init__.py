"""RabbitMQ as a broker, over AMQP 0-9-1: an asynchronous broker for workers, producers for clients."""
