"""What `import deploykit` offers: submit and its like, and what they return."""
