from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    operations = (
        migrations.CreateModel(
            "Order",
            [
                ("id", models.BigAutoField(primary_key=True)),
                ("item", models.CharField(max_length=50)),
                ("state", models.CharField(max_length=20, default="new")),
            ],
        ),
        migrations.CreateModel(
            "Tick",
            [
                ("id", models.BigAutoField(primary_key=True)),
                ("name", models.CharField(max_length=50)),
                ("task_id", models.CharField(max_length=50)),
            ],
        ),
    )
