def my_policy(request):
    """Order by the number of earlier requests of the user, and then by length with aging."""
    within = request.num_prompt_tokens + 8 * request.arrival
    return request.num_earlier + within / 1000
