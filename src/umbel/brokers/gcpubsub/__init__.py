"""Google Pub/Sub as a broker, over its REST interface; a coordination store adds what Pub/Sub cannot do."""
